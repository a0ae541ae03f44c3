//! Environments as processes of this machine.
