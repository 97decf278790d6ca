"""What a training loop imports: samples, client, alignment, recipes."""
