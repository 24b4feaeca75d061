"""Assembles the command line. The module of a subcommand is imported only when the subcommand is used."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from veomni_core.cli.frozen import frozen_as_said
from veomni_core.descriptions.references import load_attribute
from veomni_core.descriptions.spec import CommandSpec
from veomni_core.discovery.discover import discover
from veomni_core.discovery.installed_plugins import installed_plugins
from veomni_core.errors import did_you_mean

_VERSIONS = "Print the versions of veomni-core and of every plugin."
_HELP = {"help_option_names": ["-h", "--help"]}
BUILTIN_VERBS = (
    CommandSpec("list", "veomni_core.cli.list_kernels:list_kernels", "What is installed: plugins, ops and kernels."),
    CommandSpec("plan", "veomni_core.cli.plan_job:plan_job", "Which kernel a job would run at each site, and why."),
)


class _FlagsOff:
    """Flags that nobody gave read as ``False`` instead of ``None``, which typer's own default to.

    Typer takes a ``bool`` as it is. To look at a ``None`` it imports pydantic, a quarter of what `veomni list` needs.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        options: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for option in options:
            if getattr(option, "is_flag", False) and option.default is None:
                option.default = False
        return options


class _Verb(_FlagsOff, TyperCommand):
    """A subcommand."""


class _Verbs(_FlagsOff, TyperGroup):
    """The built-in subcommands, and those of plugins."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        builtin = {verb.name: verb for verb in BUILTIN_VERBS}
        spec = builtin.get(cmd_name) or self._verbs.get(cmd_name)
        return command(spec) if spec else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb = args[0]
        if not ctx.resilient_parsing:  # what is completed runs nothing
            args = ctx.with_resource(frozen_as_said(args))  # before a verb is looked for: that imports plugins
        if not verb.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, verb) is None:
            ctx.fail(f"No such command {verb!r}. {did_you_mean(verb, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, spec.help) for name, spec in self._verbs.items()])

    @functools.cached_property
    def _verbs(self) -> Mapping[str, CommandSpec]:
        """All verbs. Finding plugins takes 20 ms, and Click asks three times."""
        return {**{verb.name: verb for verb in BUILTIN_VERBS}, **discover().commands}


def build_app() -> typer.Typer:
    """The application; calling it parses ``sys.argv``."""
    app = typer.Typer(
        name="veomni",
        cls=_Verbs,
        help="Kernel plugins for LLM training: found, checked, chosen and bound by config.",
        context_settings=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_about)
    return app


def _about(
    version: Annotated[bool, typer.Option("--version", help=_VERSIONS, is_eager=True, callback=_versions)] = False,
) -> None:
    """Kernel plugins for LLM training: found, checked, chosen and bound by config."""


def _versions(wanted: bool) -> None:
    """Print a line for each distribution of the project that is installed, whether its plugin loads or not."""
    if wanted:
        plugins = {f"{plugin.distribution} {plugin.version}" for plugin in installed_plugins()}
        print(*sorted({f"veomni-core {version('veomni-core')}", *plugins}), sep="\n")
        raise typer.Exit


def command(spec: CommandSpec) -> Any:
    """The command that ``spec`` describes; its module is imported now."""
    verb: Any = load_attribute(spec.target)
    if not isinstance(verb, typer.Typer):
        function, verb = verb, typer.Typer(add_completion=False, rich_markup_mode=None)
        verb.command(name=spec.name, cls=_Verb, help=spec.help or None, context_settings=_HELP)(function)
    found = get_command(verb)
    found.name = spec.name
    return found
