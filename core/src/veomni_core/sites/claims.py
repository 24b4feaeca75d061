"""One rule for each op at each module: where several find it, the one with a proof has it, or none has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from veomni_core.sites.site import Site


def settle_claims(sites: Iterable[Site]) -> tuple[Site, ...]:
    """``sites``, with the variant taken from every site whose op and module another rule has, or claims as well.

    A proven site goes before a declared one. Where that does not decide, both are left to the model's own code, with
    both rules in the evidence.
    """
    sites = tuple(sites)
    claims: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        if site.variant is not None:
            claims.setdefault((site.op_name, site.path), []).append(site)
    return tuple(_settled(site, claims.get((site.op_name, site.path), [])) for site in sites)


def _settled(site: Site, claims: list[Site]) -> Site:
    rules = {claim.rule for claim in claims}
    if site.variant is None or len(rules) < 2:
        return site
    proven = {claim.rule for claim in claims if not claim.declared}
    if proven == {site.rule}:
        return site
    if len(proven) == 1:
        return replace(site, variant=None, evidence=f"the rule {proven.pop()!r} has proven this module and has it")
    named = " and ".join(repr(rule) for rule in sorted(rules))
    return replace(site, variant=None, evidence=f"the rules {named} both claim this module; leave one of them out")
