"""What each kind of patch does to a modeling file, and which patches are refused."""

from __future__ import annotations

import pytest
from planted_upstream import run

from veomni_patchgen import PatchConfig, PatchError

NORM = """
@config.override_method("DenseNorm.forward", description="twice")
def forward(self, x):
    # as the paper has it
    return 2 * x
"""


def test_an_overridden_method_keeps_its_decorators_and_its_comments(planted):
    generated = planted.generate(NORM)
    norm = run(generated)["DenseNorm"](3)
    assert norm.forward(5) == 10 and norm.forward.decorated
    assert "# patchgen: override_method DenseNorm.forward: twice\n" in generated.text
    assert "# as the paper has it" in generated.text and "# Copyright of the planted model" in generated.text
    assert "from planted.activations import ACTIVATIONS" in generated.text
    assert generated.is_formatted and generated.text == planted.generate(NORM).text


def test_classes_and_functions_are_replaced_under_upstreams_names(planted):
    names = run(
        planted.generate("""
        class Mixin:
            pass

        @config.replace_class("DenseNorm")
        class FusedNorm(Mixin):
            def __init__(self, width, eps=1.0):
                self.kind = FusedNorm

            def forward(self, x):
                return fused_rotate(x, x)[0]

        @config.replace_function("rotate")
        def fused_rotate(q, k):
            rotate = 4
            return q + rotate, k
        """)
    )
    norm = names["DenseNorm"](1)
    assert norm.kind is names["DenseNorm"] and norm.forward(3) == 7 and "FusedNorm" not in names
    assert "rotate_half" not in names, "nothing uses it any more"


def test_an_external_class_is_imported_under_the_name(planted):
    code = 'config.patches.append(create_patch_from_external("DenseNorm", "fractions", "Fraction"))\n'
    assert run(planted.generate(code))["DenseNorm"].__name__ == "Fraction"
    with pytest.raises(PatchError, match="fractions has no Fractio.*'Fraction'"):
        planted.generate(code.replace('"Fraction"', '"Fractio"'))


def test_what_wraps_an_init_calls_upstreams_once_under_inheritance(planted):
    names = run(
        planted.generate("""
        @config.modify_init("DenseNorm")
        def norm_init(original_init, self, *args, **kwargs):
            original_init(self, *args, **kwargs)
            self.seen = ["norm"]

        @config.modify_init("DenseLayer")
        def layer_init(original_init, self, width):
            original_init(self, width)
            self.seen.append("layer")

        @config.modify_init("DenseTwin")
        def twin_init(original_init, self, width):
            original_init(self, width + 1)
            self.seen.append("twin")
        """)
    )
    twin = names["DenseTwin"](2)
    assert twin.seen == ["norm", "layer", "twin"] and (twin.width, twin.deep) == (3, True)


OWN = """class DenseThird(DenseTwin):
    def forward(self, x):
        return x"""


def test_an_inherited_method_is_overridden_in_the_one_class(planted):
    planted.change("class DenseTwin(DenseLayer): ...", "class DenseTwin(DenseLayer): ...\n\n\n" + OWN)
    generated = planted.generate("""
        @config.override_method("DenseTwin.forward")
        def forward(self, x):
            return super().forward(x) + 100

        @config.override_method("DenseTwin.added", new=True)
        def added(self):
            return 1
        """)
    names = run(generated)
    assert (
        "override_method DenseTwin.forward does not reach DenseThird, which has a forward of its own" in generated.notes
    )
    assert names["DenseTwin"](2).forward(3) == 107 and names["DenseLayer"](2).forward(3) == 7
    assert names["DenseTwin"](2).added() == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('@config.override_method("DenseNorm.forwards")', "has no such method. Did you mean 'forward'"),
        ('@config.override_method("DenseNorms.forward")', "no class DenseNorms. Did you mean 'DenseNorm'"),
        ('@config.replace_function("rotated")', "no function rotated. Did you mean 'rotate'"),
        ('@config.override_method("DenseNorm.forward", new=True)', "but upstream has it"),
        ('@config.modify_method("DenseNorm.forward")', "never calls its first parameter"),
        ('@config.replace_class("DenseNorm")', "is no class"),
    ],
)
def test_a_target_that_is_not_there_is_refused(planted, code, words):
    with pytest.raises(PatchError) as error:
        planted.generate(f"{code}\ndef patched(self, x):\n    return 2 * x\n")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "body", ["original_init(self, width, *more, eps=eps, **others)", '"""Says it."""\n    return {}']
)
def test_an_init_that_only_calls_upstreams_is_refused(planted, body):
    code = '@config.modify_init("DenseNorm")\ndef init(original_init, self, width, *more, eps=1.0, **others):\n    '
    body = body.format("original_init(self, width, *more, eps=eps, **others)")
    with pytest.raises(PatchError, match="init changes nothing: it only calls upstream's method"):
        planted.generate(code + body + "\n")
    planted.generate(code + body.replace("eps=eps", "eps=2 * eps") + "\n")


def test_a_patch_that_changes_nothing_is_refused(planted):
    code = """
    @config.override_method("DenseNorm.forward")
    def forward(self, x):
        # only a comment is new
        y = x * self.width
        return y + self.eps
    """
    with pytest.raises(PatchError, match="changes nothing"):
        planted.generate(code)
    with pytest.raises(PatchError, match="same target"):
        planted.generate(NORM + NORM)


def test_fields_that_upstream_passes_are_not_lost(planted):
    code = """
    @config.override_method("DenseModel.forward")
    def forward(self, x):
        return DenseOutput(hidden=x)
    """
    with pytest.raises(PatchError, match="passes cache to DenseOutput"):
        planted.generate(code)
    declared = code.replace('forward")', 'forward", declares="no cache in training")')
    assert "# patchgen: declares: no cache in training" in planted.generate(declared).text
    with pytest.raises(
        PatchError, match=r"DenseOutput \(upstream's line 10\) has no field hiden. Its fields: cache, hidden"
    ):
        planted.generate(code.replace("hidden=x", "hiden=x, cache=x"))


SIBLING = """
from veomni_patchgen import PatchConfig
from patches import forward, scaled, config as dense_config

config = PatchConfig(source_module="planted.modeling_sparse", target_file="patched_sparse.py")
"""


def test_a_siblings_method_is_renamed_by_scope(planted):
    planted.patches("""
    SCALE = 3

    def scale(x):
        return SCALE * x

    @config.override_method("DenseModel.forward")
    def forward(self, x):
        return DenseOutput(hidden=x, cache=None)

    @config.override_method("DenseNorm.forward")
    def scaled(self, x):
        DenseLayer = "a local name"
        return scale(x), isinstance(self, DenseNorm), DenseLayer, self.DenseTwin
    """)
    shared = 'config.override_method("SparseNorm.forward", replacement=scaled, name_map={"Dense": "Sparse"})\n'
    generated = planted.generate(shared, "sibling", SIBLING)
    names = run(generated)
    names["SparseNorm"].DenseTwin = "an attribute"
    assert names["SparseNorm"](1).forward(2) == (6, True, "a local name", "an attribute")
    assert "import patches" not in generated.text and "DenseLayer =" in generated.text
    lost = 'config.override_method("SparseModel.forward", replacement=forward, name_map={"Dense": "Sparse"})\n'
    with pytest.raises(PatchError, match="not both have router_logits, which would be lost"):
        planted.generate(lost, "sibling", SIBLING)


def test_a_config_inherits_its_sibling_and_replaces_some_of_it(planted):
    planted.patches(
        NORM
        + """
@config.replace_function("rotate")
def rotate(q, k):
    return q, k

config.add_post_import_block("FLAG = 'from a block'")
forward = scaled = None
"""
    )
    head = SIBLING.replace("sparse", "dense").replace('"patched_dense.py"', '"patched_npu.py", inherits=dense_config')
    generated = planted.generate(NORM.replace("2 * x", "npu(x)") + "\ndef npu(x):\n    return -x\n", "sibling", head)
    names = run(generated)
    assert names["DenseNorm"](1).forward(2) == -2 and names["rotate"](1, 2) == (1, 2) and names["FLAG"]
    assert generated.config.target_file == "patched_npu.py"
    # As VeOmni's own configs take a sibling's over, one list at a time.
    extended = """
    config.post_import_blocks.extend(dense_config.post_import_blocks)
    config.helpers.extend(dense_config.helpers)
    config.additional_imports.extend(dense_config.additional_imports)
    config.override_method("DenseNorm.forward", replacement=dense_config.patches[0].replacement)
    """
    names = run(planted.generate(extended, "sibling", head.replace(", inherits=dense_config", "")))
    assert names["DenseNorm"](1).forward(2) == 4 and names["FLAG"] and names["rotate"](1, 2) == (-1, -2)


def test_helpers_come_along_or_are_named(planted):
    code = """
    import math
    import collections.abc as abstract

    try:
        from fused import fast
    except ImportError:
        fast = None

    def third(x):
        return x if fast is None else math.floor(x)

    def second(x: "abstract.Sized"):
        return third(x)

    @config.override_method("DenseNorm.forward")
    def forward(self, x):
        return second(x)
    """
    generated = planted.generate(code)
    assert run(generated)["DenseNorm"](1).forward(2) == 2
    assert "came along with override_method DenseNorm.forward: second" in generated.notes
    for wrong, words in (
        (("third(x)\n", "thrid(x)\n"), "second, which .* uses thrid, which nothing binds. Did you mean 'third'"),
        (("math.floor", "config.floor"), "uses config, a config"),
    ):
        with pytest.raises(PatchError, match=words):
            planted.generate(code.replace(*wrong))


def test_a_name_that_means_two_things_is_refused(planted):
    uses = NORM.replace("2 * x", "rotate_half(x), ACTIVATIONS")
    with pytest.raises(PatchError, match="planted.modeling_dense has a rotate_half too: rename yours"):
        planted.generate("def rotate_half(x):\n    return x\n" + uses)
    with pytest.raises(PatchError, match=r"ACTIVATIONS is math.pi, but in the generated file it is planted.activ"):
        planted.generate("from math import pi as ACTIVATIONS\n" + uses)
    with pytest.raises(PatchError, match="uses rotate_hlaf. Did you mean 'rotate_half'"):
        planted.generate(
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.modeling_dense import rotate_hlaf\n"
            + uses.replace("rotate_half", "rotate_hlaf")
        )


def test_what_an_exclusion_leaves_dead_goes_too_and_what_refers_to_it_is_named(planted):
    code = 'config.exclude_from_output("DenseTalker")\n'
    with pytest.raises(PatchError, match=r"still refers to DenseTalker, in DenseBase._init_weights"):
        planted.generate(code)
    code += '@config.override_method("DenseBase._init_weights")\ndef init(self, module):\n    return module\n'
    generated = planted.generate(code)
    names = run(generated)
    assert names["__all__"] == ["DenseModel"] and "gone_with_the_talker" not in names
    assert "unused_before" in names, "upstream itself did not use it"
    code += 'config.exclude_from_output("DenseLayer", "DenseTwin")\n'
    assert run(planted.generate(code))["DenseModel"]._no_split_modules == []
    planted.change("_no_split_modules", "records = {1: 'DenseLayer'}\n    _no_split_modules")
    with pytest.raises(PatchError, match="refers to DenseLayer, in DenseModel. Override"):
        planted.generate(code)
    with pytest.raises(PatchError, match="refers to DenseLayer, in DenseTwin, DenseModel"):
        planted.generate(code.replace(', "DenseTwin"', ""))
    with pytest.raises(PatchError, match="no class or function DenseTalkr. Did you mean 'DenseTalker'"):
        planted.generate(code + 'config.exclude_from_output("DenseTalkr")\n')


IMPORTS = '''
config.drop_import_names("ACTIVATIONS")
config.add_import("math", names=["tau"])
config.add_import("fractions", alias="parts", is_from_import=False)
config.add_post_import_block("""
try:
    from fused import ACTIVATIONS
except ImportError:
    ACTIVATIONS = 7
""")

@config.add_helper
def doubled(x):
    return 2 * x

@config.override_method("DenseNorm.forward")
def forward(self, x):
    return tau, parts.Fraction(1, 2)
'''


def test_imports_are_dropped_added_and_put_into_blocks(planted):
    names = run(planted.generate(IMPORTS))
    assert names["ACTIVATIONS"] == 7 and names["doubled"](2) == 4
    assert names["DenseNorm"](1).forward(1)[1] == 0.5
    with pytest.raises(PatchError, match="imports no ACTIVATION. Did you mean 'ACTIVATIONS'"):
        planted.generate('config.drop_import_names("ACTIVATION")\n')
    with pytest.raises(PatchError, match="still refers to ACTIVATIONS, in DenseModel.forward"):
        planted.generate('config.drop_import_names("ACTIVATIONS")\n')
    with pytest.raises(PatchError, match="nothing uses tau"):
        planted.generate('config.add_import("math", names=["tau"])\n')


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_file": "../../up.py"}, "write a file's name"),
        ({"target_file": "/etc/there.py"}, "write a file's name"),
        ({"target_file": "file.txt"}, "write a file's name"),
        ({"source_module": 3}, "is a module's dotted name"),
        ({"inherits": "gpu"}, "inherits= a PatchConfig"),
    ],
)
def test_a_config_of_other_things_is_refused(fields, words):
    with pytest.raises(PatchError, match=words):
        PatchConfig(**{"source_module": "planted.modeling_dense", "target_file": "file.py", **fields})


def test_a_config_that_inherits_itself_is_refused():
    one = PatchConfig("planted.modeling_dense", "one.py")
    two = PatchConfig("planted.modeling_dense", "two.py", inherits=one)
    one.inherits = two
    three = PatchConfig("planted.modeling_dense", "three.py", inherits=two)
    for config in (one, two, three):
        with pytest.raises(PatchError, match="its config inherits itself"):
            config.all_patches()
