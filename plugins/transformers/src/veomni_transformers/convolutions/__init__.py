"""causal_conv1d: functions that mixers call."""
