"""Measuring, training and proving; the engine never imports them."""
