//! Places at which a test ends the process as a power cut would: one at each gap of `docs/failure-windows.md`.
//!
//! Only with the cargo feature `failpoints`, which nothing that ships has: without it a call is nothing. `tests/chaos` crashes at each
//! in turn; `tests/tidy.rs` compares the names with the document.

/// Where to crash: `name`, or `name:n` for the n-th time that the place is reached.
#[cfg(feature = "failpoints")]
pub const VARIABLE: &str = "CRASH_AT";
/// The same for the executors of the local environments, which do not get the controller's variables.
#[cfg(feature = "failpoints")]
pub const EXECUTOR_VARIABLE: &str = "CRASH_EXECUTOR_AT";

/// Does not return if this is where the process shall end.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn reached(_name: &'static str) {}

/// Does not return if this is where the process shall end.
#[cfg(feature = "failpoints")]
pub fn reached(name: &'static str) {
    use std::sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    };

    static WANTED: LazyLock<Option<(String, u32)>> = LazyLock::new(|| {
        let text = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty())?;
        let (name, times) = text.split_once(':').unwrap_or((&text, "1"));
        Some((name.to_owned(), times.parse().unwrap_or(1)))
    });
    static REACHED: AtomicU32 = AtomicU32::new(0);

    let Some((wanted, times)) = &*WANTED else { return };
    if wanted == name && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == *times {
        // No destructor, no flush, no signal handler: what is not on disk or at a neighbour is lost.
        let own = nix::unistd::Pid::this();
        nix::sys::signal::kill(own, nix::sys::signal::SIGKILL).ok();
        loop {
            std::thread::park();
        }
    }
}
