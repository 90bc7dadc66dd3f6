//! Tests of the whole relay against real servers. One binary, so that it is linked once.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test reports by panicking and printing")]

mod atomic;
mod bounds;
mod cases;
mod catch_up;
mod delivery;
mod documents;
mod faults;
mod modes;
mod privileges;
mod readback;
mod soak;
mod source_facts;
mod wrong_things;
