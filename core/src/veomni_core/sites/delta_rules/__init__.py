"""chunk_gated_delta_rule sites: where they are found, and what their functions compute."""
