"""Read safetensors of any model into the parts of its parameters that a rank holds, and the layout of such files."""
