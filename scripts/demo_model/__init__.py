"""The embedded demo model: corpus, tokenizer, training, evaluation."""
