"""What a model file says about itself, read from its header alone: tensor names, shapes and places. No torch."""
