"""``veomni chat`` and ``veomni generate``: a trained model answers. Their code is imported only when they run."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from veomni_core.commands import AsJson, fit, print_json
from veomni_core.errors import ConfigError

Source = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, a checkpoint or an export, also of an adapter.")
]
Most = Annotated[int, typer.Option("--max-new-tokens", min=1, help="The most tokens of an answer.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token; above, tokens are drawn.")
]
_SEVERAL = "that the prompt is about; may be given several times."
Image = Annotated[list[str] | None, typer.Option("--image", metavar="PATH", help=f"A picture {_SEVERAL}")]
Video = Annotated[list[str] | None, typer.Option("--video", metavar="PATH", help=f"A video {_SEVERAL}")]
Audio = Annotated[list[str] | None, typer.Option("--audio", metavar="PATH", help=f"A sound {_SEVERAL}")]
Eager = Annotated[bool, typer.Option("--eager", help="Run the model's own code in place of kernels.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Whether code that comes with the model may run.")]


def generate(
    source: Source,
    prompt: Annotated[str, typer.Option("--prompt", help="The text that the model goes on with.")],
    image: Image = None,
    video: Video = None,
    audio: Audio = None,
    most: Most = 128,
    temperature: Temperature = 0.0,
    eager: Eager = False,
    trust_remote_code: Trust = False,
    json: AsJson = False,
) -> None:
    """Continue a text with the model of a run, token by token, and say which kernels run."""
    media = {"image": image or (), "video": video or (), "audio": audio or ()}
    answerer = _answerer(source, eager, trust_remote_code)
    if json:
        print_json(_plain(answerer, prompt, answerer.answer(prompt, most, temperature, media=media)))
        return
    print(fit(answerer.describe()), file=sys.stderr)
    _close(answerer.answer(prompt, most, temperature, True, media), most)


def chat(
    source: Source,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="One message; without it, messages are read line by line.")
    ] = None,
    image: Image = None,
    video: Video = None,
    audio: Audio = None,
    most: Most = 512,
    temperature: Temperature = 0.0,
    eager: Eager = False,
    trust_remote_code: Trust = False,
    json: AsJson = False,
) -> None:
    """Talk with the model of a run, through its chat template. An empty line or Ctrl-D ends the talk."""
    if json and prompt is None:
        raise ConfigError("--json prints one answer; give the message with --prompt")
    answerer = _answerer(source, eager, trust_remote_code)
    messages: list[dict[str, str]] = []
    media = {"image": image or (), "video": video or (), "audio": audio or ()}
    if not json:
        print(fit(answerer.describe()), file=sys.stderr)
    while said := prompt if prompt is not None else _next():
        messages.append({"role": "user", "content": said})
        found = answerer.answer(messages, most, temperature, not json, media)
        if json:
            print_json(_plain(answerer, said, found))
        else:
            _close(found, most)
        messages.append({"role": "assistant", "content": found.text})
        if prompt is not None:
            break


def _answerer(source: Path, eager: bool, trust_remote_code: bool) -> Any:
    from veomni_trainer.setup.postponed import postpone

    if not (source / "adapter_config.json").is_file():  # as for training, of which PEFT is a part
        postpone("bitsandbytes")
    import transformers

    from veomni_trainer.run.answering import Answerer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers' own calls
        return Answerer(source, eager, trust_remote_code)


def _next() -> str:
    """The next line that is typed; empty at the end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def _plain(answerer: Any, prompt: str, answer: Any) -> dict[str, Any]:
    plan = answerer.binding.plan
    return {
        "weights": str(answerer.folder),
        "prompt": prompt,
        "text": answer.text,
        "tokens": answer.tokens,
        "ended": answer.ended,
        "ends": answerer.ends,
        "kernels": [str(kernel.spec) for kernel in plan.kernels],
        "plan_sha256": plan.sha256,
    }


def _close(answer: Any, most: int) -> None:
    if not answer.ended:
        print(f"(not ended after {answer.tokens} tokens; --max-new-tokens {most})", file=sys.stderr)
