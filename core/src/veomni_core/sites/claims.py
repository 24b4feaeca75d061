"""At most one rule per op and module: where several rules claim a module, the only one that has proven it gets it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from veomni_core.sites.site import Site


def settle_claims(sites: Iterable[Site]) -> tuple[Site, ...]:
    """``sites``, in which at most one rule per op and module keeps its variant; the other sites get ``variant=None``.

    A proven site takes precedence over declared ones. If several rules have proven the module, or none has, no rule
    gets it: the model's own code runs there, and the evidence names the rules. A rule that looked at a module and could
    not prove it says nothing where another rule claims it.
    """
    sites = tuple(sites)
    claims: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        if site.variant is not None:
            claims.setdefault((site.op_name, site.path), []).append(site)
    claimed = [(site, claims.get((site.op_name, site.path), [])) for site in sites]
    return tuple(_settled(site, rivals) for site, rivals in claimed if site.variant is not None or not rivals)


def _settled(site: Site, claims: list[Site]) -> Site:
    rules = {claim.rule for claim in claims}
    if site.variant is None or len(rules) < 2:
        return site
    proven = {claim.rule for claim in claims if not claim.declared}
    if proven == {site.rule}:
        return site
    if len(proven) == 1:
        why = f"the rule {proven.pop()!r} has proven this module, so it takes precedence"
        return replace(site, variant=None, evidence=why)
    named = " and ".join(repr(rule) for rule in sorted(rules))
    return replace(site, variant=None, evidence=f"the rules {named} both claim this module; leave one of them out")
