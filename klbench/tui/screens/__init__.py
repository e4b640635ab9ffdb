"""The screens; each answers where am I, what is it doing, what can I press next."""
