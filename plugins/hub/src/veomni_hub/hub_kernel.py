"""What the kernel file says of one kernel, and the spec that follows from it. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veomni_core import HardwareRequirement, KernelSpec


@dataclass(frozen=True)
class Package:
    """Where a kernel's code is.

    Attributes:
        name: the kernels' name in jobs.
        variants: the digest of each build variant that may be loaded, by the variant's name.
        folder: the folder that holds ``build/``; ``None`` for a repository.
        repo, revision: the repository on the Hub, and the commit.
        download: whether the repository may be downloaded; without it, it must be in the cache.
        source: the file that lists the package, for messages.
    """

    name: str
    variants: Mapping[str, str]
    folder: Path | None
    repo: str
    revision: str
    download: bool
    source: Path

    def __str__(self) -> str:
        return f"{self.name} of {self.source}"

    @property
    def origin(self) -> str:
        """The folder, or the repository and its commit, for messages."""
        return str(self.folder) if self.folder else f"{self.repo} at {self.revision}"


@dataclass(frozen=True)
class HubKernel:
    """A layer or a function of a package, as a kernel of one variant of one op.

    Attributes:
        package: where its code is.
        op, variant: what it computes.
        layer, function: the name of a class in the package's ``layers``, or of a function of the package. One is empty.
        call: for each parameter of the function, or of the layer's ``forward``, the contract's argument that it gets.
            ``self.weight`` is an attribute that the layer reads. A mapping ``{value: ...}`` stands for a constant.
        hardware: what it requires of the machine.
        promises: fields of the spec that are promises of the kernel, such as ``dtypes`` and ``backward``.
    """

    package: Package
    op: str
    variant: str
    layer: str
    function: str
    call: Mapping[str, Any]
    hardware: HardwareRequirement
    promises: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}/{self.variant}:{self.package.name}"

    @property
    def digest(self) -> str:
        """A hash of the variants' digests, and of what is called how: it changes with anything that may run.

        And with the features, since who adds one has it called with what no check has seen.
        """
        what = [self.op, self.variant, self.layer, self.function, dict(self.call)]
        what += [each for name, each in self.promises.items() if name == "features"]
        runs = [dict(self.package.variants), *what]
        return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()

    @property
    def spec(self) -> KernelSpec:
        """The spec. Its factory names the digest, so a plan that was made with other code can't load this one."""
        return KernelSpec(
            name=self.package.name,
            op_name=self.op,
            variant=self.variant,
            factory=f"veomni_hub.factories:sha256_{self.digest}",
            hardware=self.hardware,
            description=f"{self.layer or self.function} of {self.package.origin}",
            digest=self.digest,
            **{"preference": 0, **self.promises},
        )
