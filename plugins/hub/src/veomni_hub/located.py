"""Finds the build variant of a package for this machine, and checks its digest before any of its code is imported."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from veomni_core.errors import ConfigError, HostError
from veomni_hub.build_variants import Fit, digest_of, variants_in
from veomni_hub.hub_kernel import Package


def located(package: Package) -> Path:
    """The folder of the build variant that this machine loads, whose files are those that the digest names.

    Only variants with a digest are considered, the best first that is there.

    Raises:
        HostError: no variant fits this machine, or the repository is not here and can't be downloaded.
        ConfigError: the folder lacks the variant, or its files are others than those of the digest.
    """
    fit = Fit.of(package.variants)
    if not fit.names:
        raise HostError(
            f"{package}: none of the build variants that it lists is for this machine ({fit.why_none()}); list one "
            "that is, or run on the machine that these are for"
        )
    folder = package.folder or _snapshot(package, fit.names)
    there = variants_in(folder)
    variant = next((name for name in fit.names if name in there), None)
    if variant is None:
        raise ConfigError(
            f"{package}: {package.origin} has no build/{' and no build/'.join(fit.names)}, which this machine needs; "
            f"it has {', '.join(there) or 'no build variant'}"
        )
    found = digest_of(there[variant])
    if found != package.variants[variant]:
        raise ConfigError(
            f"{package}: the files of {variant} in {package.origin} are not those that were listed: {found}, and the "
            f"file says {package.variants[variant]}. Nothing of them was imported. If the change is meant, look at it, "
            "write the new digest, and run veomni verify veomni-hub again"
        )
    return there[variant]


def _snapshot(package: Package, variants: tuple[str, ...]) -> Path:
    """The repository's folder in the Hub's cache, into which it is downloaded only if the file says so."""
    try:
        return Path(
            snapshot_download(
                package.repo,
                repo_type="kernel",
                revision=package.revision,
                allow_patterns=[f"build/{variant}/*" for variant in variants],
                ignore_patterns=["*.pyc", "**/__pycache__/**"],
                local_files_only=not package.download,
            )
        )
    except (HfHubHTTPError, OSError) as error:
        if package.download:
            raise HostError(f"{package}: {package.origin} can't be downloaded: {error}") from error
        raise HostError(
            f"{package}: {package.origin} is not in the Hub's cache, and the file doesn't allow to download it; write "
            "download: true beside revision, or put the repository into a folder and write folder"
        ) from error
