"""Whole decoder layers, composed of the ops."""
