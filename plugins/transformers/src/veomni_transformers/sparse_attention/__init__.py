"""dsa_indexer and dsa_attention: DeepSeek's sparse attention, of an indexer and an attention over what it chose."""
