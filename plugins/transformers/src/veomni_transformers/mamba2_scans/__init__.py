"""mamba2_scan sites: where they are found, and what their functions compute."""
