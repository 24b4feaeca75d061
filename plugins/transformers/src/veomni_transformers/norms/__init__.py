"""rms_norm and rms_norm_gated: modules that normalise their last dimension."""
