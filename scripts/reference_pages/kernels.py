"""docs/reference/kernels.md: every kernel by op, what it needs, and where its speed was measured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from reference_pages.benchmarks import title
from reference_pages.markdown import table
from reference_pages.repository import registry
from reference_pages.speeds import pages, speeds
from veomni_core.descriptions.hardware import ANY_DEVICE, HardwareRequirement, show_capability
from veomni_core.descriptions.kernel_spec import DTYPES, KernelSpec

_HEAD = """# Kernels

What the distributions of this repository bring, by op: the names that a job may write, and what each kernel needs.
`auto` takes the usable kernel with the highest preference, and none whose preference is 0. `veomni explain OP` says
which of them can run on your machine, and `veomni plan` at which sites of a model: some kernels are limited to widths
or head sizes as well, which the plan says.

*Device* is the compute capability for NVIDIA's GPUs. Under *notes*: `no backward` can only evaluate; `may differ`
does not promise the same bits on every run; `batch-invariant` promises them in [every batch](../design/same-bits.md);
`one rank's experts` runs under expert parallelism.

Below each op is what its kernels took in one shape of each result file: the median of forward and backward,
for rotary embeddings, gated norms, convolutions, `quack`'s norm and the norms on an H100 as a CUDA graph. *Best peer*
is the fastest contender of the same run that isn't a kernel of this repository; *of its time* is our time divided by
its. The pages and their result files have other shapes, dtypes, the spread, memory, versions, and how it was measured.
"""


def page() -> str:
    """The page's text."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    found = registry()
    for op in found.ops.values():
        kernels = sorted(
            found.kernels(op.name),
            key=lambda kernel: (kernel.name, op.variants.index(op.canonical_variant(kernel.variant))),
        )
        yield f"## `{op.name}`\n"
        yield f"Field `{op.config_field}`: {op.description}. [Its contract](ops.md#{op.name}).\n"
        if not kernels:
            yield "No kernel yet: sites are found and proven, and stay the model's own code.\n"
            continue
        rows = [_row(list(group)) for _, group in groupby(kernels, key=lambda kernel: kernel.name)]
        yield from table(("kernel", "from", "variants", "device", "packages", "dtypes", "preference", "notes"), rows)
        yield ""
        yield from speeds(op.name)
        links = ", ".join(f"[{title(name)}](../benchmarks/{name}.md)" for name in pages(op.name))
        yield f"Measured: {links}.\n" if links else "Not measured by itself.\n"


def _row(kernels: list[KernelSpec]) -> tuple[str, ...]:
    """One name's row; its variants may differ in what they need, and then each says its own."""
    return (
        f"`{kernels[0].name}`",
        registry().plugin_of(kernels[0]).distribution,
        ", ".join(dict.fromkeys(f"`{kernel.variant}`" for kernel in kernels)),
        _told(kernels, lambda kernel: " or ".join(dict.fromkeys(map(_device, _alternatives(kernel))))),
        _told(
            kernels,
            lambda kernel: " or ".join(
                dict.fromkeys(", ".join(each.packages) or "-" for each in _alternatives(kernel))
            ),
        ),
        _told(kernels, lambda kernel: "all" if {*kernel.dtypes} == {*DTYPES} else ", ".join(kernel.dtypes)),
        _told(kernels, lambda kernel: str(kernel.preference)),
        _told(kernels, _notes) or "-",
    )


def _told(kernels: list[KernelSpec], tell: object) -> str:
    assert callable(tell)
    said = {kernel.variant: tell(kernel) for kernel in kernels}
    if len({*said.values()}) == 1:
        return str(next(iter(said.values())))
    return "; ".join(f"`{variant}`: {what or 'none'}" for variant, what in said.items())


def _alternatives(kernel: KernelSpec) -> tuple[HardwareRequirement, ...]:
    return (kernel.hardware, *kernel.hardware.others)


def _device(needed: HardwareRequirement) -> str:
    low, high = needed.min_compute_capability, needed.max_compute_capability
    text = "any" if needed.device_type == ANY_DEVICE else needed.device_type
    if low is not None and low == high:
        return f"{text} {show_capability(low)}"
    text += f" {show_capability(low)}" if low is not None else ""
    return text + (f" to {show_capability(high)}" if high is not None else " and above" * (low is not None))


def _notes(kernel: KernelSpec) -> str:
    found = {
        "no backward": not kernel.backward,
        "may differ": not kernel.deterministic,
        "batch-invariant": kernel.batch_invariant,
        "one rank's experts": kernel.expert_parallel,
    }
    return ", ".join(words for words, holds in found.items() if holds)
