"""What a step may call while it is traced: gradients, host calls, the NaN guard."""
