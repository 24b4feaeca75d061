"""rotary_pos_emb and rotary_pos_emb_vision: functions that attention modules call."""
