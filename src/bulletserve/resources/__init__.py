"""Component 3, the resource manager: SMs, or CPU threads, as something that can be handed out."""
