"""What both sides of the socket share: messages, channel, shared tensors, and errors."""
