"""Every hook of version 1, and every field that its specs had."""

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
    hookimpl,
)

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_ops():
    return [
        OpSpec(
            name="first_op",
            variants=("plain",),
            config_field="first_op_implementation",
            default="eager",
            contract="acme_first.contract:CONTRACTS",
            description="an op of its own",
            variant_aliases={"simple": "plain"},
            published={"first": "acme-first"},
            legacy_values={"frist": "first"},
            follows_autocast=True,
        )
    ]


@hookimpl
def veomni_variants():
    return [VariantSpec(op_name="rms_norm", name="first_norm", contract="acme_first.contract:NORM")]


@hookimpl
def veomni_kernels():
    return [
        KernelSpec(
            name="first",
            op_name="first_op",
            variant="simple",
            factory="acme_first.kernels:make",
            hardware=HardwareRequirement("cpu") | HardwareRequirement("cuda", 70, 120, packages=("torch>=2",)),
            description="a kernel with an option",
            preference=10,
            deterministic=False,
            backward=True,
            dtypes=("float32", "bfloat16"),
            expert_parallel=False,
            features=("masks",),
            can_run="acme_first.kernels:can_run",
            mask="acme_first.kernels:mask",
            options=(KernelOption("rows", 4, choices=(4, 8), minimum=1, description="rows at a time"),),
            digest="0123456789abcdef",
        ),
        *KernelSpec.for_variants(
            ("standard", "first_norm"), name="first", op_name="rms_norm", factory="acme_first.kernels:{variant}"
        ),
    ]


@hookimpl
def veomni_devices():
    return [
        DeviceSpec(
            device_type="first",
            detect="acme_first.device:detect",
            named={"first1": Hardware("first", name="First 1", count=8)},
            preset={"rms_norm_implementation": "first"},
        )
    ]


@hookimpl
def veomni_sites():
    return [
        SiteRule(
            name="first modules",
            locator="acme_first.sites:FirstModules",
            order=40,
            installs_eager=False,
            reads_parameters=True,
        )
    ]


@hookimpl
def veomni_commands():
    return [
        CommandSpec(
            name="first",
            target="acme_first.command:first",
            help="does the first thing",
            job_check="acme_first.command:check",
        )
    ]
