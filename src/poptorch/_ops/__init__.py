"""Define the operators that traced graphs call, and what they need while a model is captured."""
