"""The verbs as a person types them: one file for each group of verbs."""
