"""Where the libraries can't run, by what the sites of a plan say. Imports neither torch nor a library."""

from __future__ import annotations

from veomni_core import Site

MOST_PLANES = 65535  # of blocks: CUDA takes no larger second or third number of a launch's grid
_WIDEST_KEY, _FLASH_QLA_HEAD = 256, 128
_WIDEST_ROW = {"float32": 16384}  # 64 KiB of one row, which a program of fla's norm holds
_WIDEST_ROW_OF_16_BITS = 32768


def fla_delta_rule(site: Site) -> str:
    """Why no delta rule of fla's can run at ``site``; empty if it can."""
    wide = [width for width in site.sizes.get("key_width", ()) if width > _WIDEST_KEY]
    return f"takes keys of up to {_WIDEST_KEY}, this site has {_shown(wide)}" if wide else ""


def flash_qla(site: Site) -> str:
    """Why FlashQLA can't run at ``site``; empty if it can. Narrower heads would be padded, at the cost of wide ones."""
    widths = {*site.sizes.get("key_width", ()), *site.sizes.get("value_width", ())}
    unfit = sorted(widths - {_FLASH_QLA_HEAD})
    return f"takes keys and values of {_FLASH_QLA_HEAD}, this site has {_shown(unfit)}" if unfit else ""


def fla_norm(site: Site) -> str:
    """Why fla's gated norm can't run at ``site``; empty if it can."""
    widest = _WIDEST_ROW.get(site.dtype or "", _WIDEST_ROW_OF_16_BITS)
    wide = [width for width in site.sizes.get("width", ()) if width > widest]
    return f"takes rows of up to {widest} in {site.dtype}, this site has {_shown(wide)}" if wide else ""


def _shown(widths: list[int]) -> str:
    return " and ".join(map(str, widths))
