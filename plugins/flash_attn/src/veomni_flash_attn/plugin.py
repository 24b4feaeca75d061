"""Declares the kernels to veomni-core. Imports neither torch nor a FlashAttention package."""

from veomni_core import HardwareRequirement, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

_HALVES = ("bfloat16", "float16")
_COMPUTED = ("padding_mask", "sliding_window", "packed", "softcap")
_BY_LENGTHS = (*_COMPUTED, "flash_attention_mask")


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """One attention kernel per library, each in the file of its name.

    Preferences follow the measurements on an H200: FlashAttention 3, 4, 2, torch's sdpa (10), FlexAttention. For full
    sequences sdpa is faster there than FlashAttention 2, but for packed and padded sequences sdpa needs a mask.
    """
    return [
        _kernel(
            "flash_attention_2",
            HardwareRequirement("cuda", min_compute_capability=80, packages=("flash-attn>=2.7,<3",)),
            "dense, padded and packed",
            preference=50,
            features=(*_BY_LENGTHS, "softcap_by_lengths", "dropout"),
        ),
        _kernel(
            "flash_attention_3",
            HardwareRequirement("cuda", 90, 90, packages=("flash-attn-3>=3.0.0b1,<4",)),
            "dense, padded and packed",
            preference=65,
            features=(*_BY_LENGTHS, "softcap_by_lengths"),
        ),
        _kernel(
            "flash_attention_4",
            HardwareRequirement("cuda", min_compute_capability=90, packages=("flash-attn-4>=4.0.0b13,<4.1",)),
            "dense, padded and packed; sinks with their gradient",
            preference=60,
            features=(*_BY_LENGTHS, "sinks"),
            can_run="veomni_flash_attn.limits:flash_attention_4",
        ),
        _kernel(
            "flex_attention",
            HardwareRequirement("cuda", min_compute_capability=80),
            "any mask, compiled by torch into one kernel",
            preference=5,
            dtypes=("float32", *_HALVES),
            features=(
                *("dense_mask", *_COMPUTED, "softcap_by_lengths", "sinks"),
                *("wide_heads", "odd_heads", "flex_attention_mask"),
            ),
            can_run="veomni_flash_attn.limits:flex_attention",
            slow_check="torch compiles it anew for each kind of mask and of call, some seconds each time",
        ),
    ]


def _kernel(
    name: str,
    hardware: HardwareRequirement,
    description: str,
    preference: int,
    features: tuple[str, ...],
    dtypes: tuple[str, ...] = _HALVES,
    can_run: str = "veomni_flash_attn.limits:flash_attention",
    slow_check: str = "",
) -> KernelSpec:
    return KernelSpec(
        name=name,
        op_name="attention",
        variant="standard",
        factory=f"veomni_flash_attn.{name}:standard",
        hardware=hardware,
        description=description,
        preference=preference,
        deterministic=False,  # FlashAttention sums dQ by atomics; FlexAttention's determinism was not tested
        dtypes=dtypes,
        features=features,
        can_run=can_run,
        slow_check=slow_check,
    )
