"""Several machines: who they are, their servers, what they say of themselves, and how a lost one is noticed."""
