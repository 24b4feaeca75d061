"""chunk_gated_delta_rule and kda sites: where they are found, and what their functions compute."""
