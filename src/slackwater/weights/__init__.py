"""Where tensors come from: folders of safetensors and state dicts, as integer views."""
