"""`Trainer`: the train, test and predict steps and the loop around them."""
