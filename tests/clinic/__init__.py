"""Trainings with one deliberate issue each, and normal ones: what the rules report about them."""
