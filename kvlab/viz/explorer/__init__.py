"""Pictures that answer: a scene and its state, shown by one ES module in notebooks and in pages of their own."""
