"""Steps whose arrays vary in size: a zoo of small cases, and a judge that compares each exactly."""
