"""`hallmark report`: what the evidence says, as one page."""
