"""transformers: our ops in its tensor parallelism, its Trainer, PEFT, accelerate."""
