"""Whole decoder layers, made of the ops."""
