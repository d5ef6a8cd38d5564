"""Models, batches, rollouts, servers, tasks and fakes that tests of several folders share."""
