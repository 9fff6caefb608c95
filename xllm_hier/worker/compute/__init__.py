"""The model's forward: attention over blocks, recurrent states, sampling, drafts."""
