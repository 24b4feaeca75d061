"""Files that can't be trained on end in a typed error that names the file and the line, and are left as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bad_files import BAD_FILES, BadFile
from small_tokenizers import byte_level

from veomni_core.errors import JobFileError
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.tokens import PretrainedTokenizer
from veomni_trainer.job.source_keys import Source

TOKENIZER = PretrainedTokenizer(byte_level(), end=0)


@pytest.mark.parametrize("bad", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused_by_what_it_is(bad: BadFile, tmp_path: Path) -> None:
    path = bad.write(tmp_path)
    before = [(file, file.read_bytes()) for file in sorted(tmp_path.rglob("*")) if file.is_file()]
    with pytest.raises(JobFileError) as caught:
        list(read_documents(Source(files=str(path), **bad.keys), TOKENIZER, Reading()))
    pattern = bad.message if re.search(r"\\d\+|\.\*", bad.message) else re.escape(bad.message)
    assert re.fullmatch(re.escape(f"data.files: {path}") + pattern, str(caught.value)), str(caught.value)
    assert [(file, file.read_bytes()) for file in sorted(tmp_path.rglob("*")) if file.is_file()] == before
