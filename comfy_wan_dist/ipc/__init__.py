"""What both sides of the socket share: messages, the channel, tensors in shared memory, and the errors."""
