"""No argument of a spec ends in an untyped error: not where the spec is made, and not where it is then looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import KEYS, TEXTS, VALUES, bounded, typed_errors
from veomni_core import (
    CommandSpec,
    DeviceSpec,
    Hardware,
    HardwareRequirement,
    KernelOption,
    KernelSpec,
    OpSpec,
    SiteRule,
    VariantSpec,
)

REFERENCES = st.sampled_from(["acme.plugin:norm", "acme:", ":norm", "acme"]) | TEXTS
NAMES = st.sampled_from(["acme", "rms_norm", "standard", "auto"]) | TEXTS
PACKAGES = st.sampled_from(["torch", "torch>=2", "acme>=1", "acme @ file:x", "a;b", "torch>=x"]) | TEXTS
CAPABILITIES = st.sampled_from([70, 90, None]) | VALUES
REQUIREMENTS = st.builds(HardwareRequirement, st.sampled_from(["cuda", "cpu", "any"]))
OPTIONS = st.sampled_from([KernelOption("rows", 4, minimum=1), KernelOption("rows", "a", ("a", "b"))])
MAPPINGS = st.dictionaries(NAMES, NAMES, max_size=2)
LIKELY: Mapping[type, Mapping[str, st.SearchStrategy[Any]]] = {
    HardwareRequirement: {
        "device_type": st.sampled_from(["any", "cpu", "cuda", "rocm"]) | TEXTS,
        "min_compute_capability": CAPABILITIES,
        "max_compute_capability": CAPABILITIES,
        "packages": st.lists(PACKAGES, max_size=2).map(tuple),
        "others": st.lists(REQUIREMENTS | VALUES, max_size=2).map(tuple),
    },
    KernelOption: {
        "name": NAMES,
        "default": VALUES,
        "choices": st.lists(VALUES, max_size=2).map(tuple),
        "minimum": VALUES,
        "description": TEXTS,
    },
    KernelSpec: {
        **dict.fromkeys(("name", "op_name", "variant"), NAMES),
        **dict.fromkeys(("factory", "can_run", "mask"), REFERENCES),
        "hardware": REQUIREMENTS,
        "dtypes": st.lists(st.sampled_from(["float32", "bfloat16", "float8"]), max_size=2).map(tuple),
        "features": st.lists(NAMES, max_size=2).map(tuple),
        "options": st.lists(OPTIONS, max_size=2).map(tuple),
        "settings": st.lists(st.tuples(NAMES, VALUES), max_size=2).map(tuple),
    },
    OpSpec: {
        **dict.fromkeys(("name", "config_field", "default"), NAMES),
        "variants": st.lists(NAMES, max_size=2).map(tuple),
        "contract": REFERENCES,
        **dict.fromkeys(("variant_aliases", "published", "legacy_values", "added"), MAPPINGS),
    },
    VariantSpec: {"op_name": NAMES, "name": NAMES, "contract": REFERENCES},
    DeviceSpec: {
        "device_type": NAMES,
        "detect": REFERENCES,
        "named": st.dictionaries(NAMES, st.just(Hardware("xpu")), max_size=2),
        "preset": MAPPINGS,
    },
    SiteRule: {"name": NAMES, "locator": REFERENCES},
    CommandSpec: {"name": NAMES, "target": REFERENCES, "help": TEXTS, "job_check": REFERENCES},
    Hardware: {"device_type": NAMES, "compute_capability": CAPABILITIES, "name": TEXTS},
}


@st.composite
def arguments(draw: st.DrawFn, spec: type) -> dict[str, Any]:
    """Arguments of ``spec``, most of them of the kind that belongs there, and one or none of any kind."""
    drawn = {each.name: draw(LIKELY[spec][each.name]) for each in fields(spec) if each.name in LIKELY[spec]}
    kept = {name: value for name, value in drawn.items() if _is_required(spec, name) or draw(st.booleans())}
    for name in draw(st.lists(st.sampled_from([each.name for each in fields(spec)]), max_size=1)):
        kept[name] = draw(VALUES)
    return kept


def _is_required(spec: type, name: str) -> bool:
    (field,) = (each for each in fields(spec) if each.name == name)
    return field.default is MISSING and field.default_factory is MISSING


def looked_at(spec: Any, values: dict[Any, Any]) -> None:
    """Use a spec as discovery and planning do."""
    str(spec), hash(spec), spec == spec
    if isinstance(spec, HardwareRequirement):
        for hardware in (Hardware.cpu(), Hardware.named("h100"), Hardware("rocm", detected=True)):
            spec.unmet(hardware), spec.chosen_for(hardware)
        assert (spec | HardwareRequirement("cpu")).unmet(Hardware("cpu", name="x")) == ()
    if isinstance(spec, KernelSpec):
        str(spec.configured("a test", values)), spec.covers, spec.key
    if isinstance(spec, KernelOption):
        for value in values.values():
            spec.check("a test", value)
    if isinstance(spec, Hardware):
        spec.describe()


@bounded(80)
@given(data=st.data(), values=st.dictionaries(st.just("rows") | KEYS, VALUES, max_size=2))
@pytest.mark.parametrize("spec", LIKELY)
def test_a_spec_is_made_or_refused(spec: type, data: st.DataObject, values: dict[Any, Any]) -> None:
    with typed_errors():
        looked_at(spec(**data.draw(arguments(spec))), values)


@bounded(60)
@given(st.dictionaries(st.sampled_from(["device_type", "others", "packages"]) | KEYS, VALUES, max_size=3) | VALUES)
def test_a_requirement_is_read_back_or_refused(data: Any) -> None:
    with typed_errors():
        HardwareRequirement.from_dict(data)


@bounded(60)
@given(TEXTS)
def test_hardware_is_known_or_refused(name: str) -> None:
    with typed_errors():
        Hardware.named(name)
