"""LoRA adapters: their files, their products, and the folder that is watched for them."""
