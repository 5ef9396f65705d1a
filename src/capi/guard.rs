//! What stands between a panic and the caller.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ep_core::engine::Group;
use ep_core::{Error, Result, Status};

use super::last_error;
use super::types::EpStatus;

/// Runs the body of the entry named `entry`; an error or panic becomes a status and its sentence.
pub(crate) fn guard(entry: &'static str, body: impl FnOnce() -> Result<()>) -> EpStatus {
    let Err(error) = catch(body) else { return Status::Ok.code() };
    last_error::set(entry, &error);
    // An error that says "success" is a defect of ours, and must not be taken for success.
    if error.status == Status::Ok { Status::Internal.code() } else { error.status.code() }
}

/// Runs a part of an entry that works on `group`: a panic in it breaks the group, since what it left
/// half done may be seen by other threads and by the peers.
pub(crate) fn contain<T>(group: &Group, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = catch(body);
    if let Err(error) = &outcome
        && error.status == Status::Internal
    {
        group.poison(&error.message);
    }
    outcome
}

/// Turns a panic into [`Status::Internal`].
fn catch<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safety: whatever the body shares with other calls belongs to a group, which `contain`
    // poisons, or is atomic.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(payload) => Err(panicked(payload)),
    }
}

fn panicked(payload: Box<dyn Any + Send>) -> Error {
    let text = match payload.downcast_ref::<&str>() {
        Some(text) => (*text).to_string(),
        None => payload.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic without text".into()),
    };
    // Dropping a foreign payload could panic again, here where nobody catches it.
    std::mem::forget(payload);
    Error::new(Status::Internal, format!("a defect of libep was caught, please report it: {text}"))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::panic::panic_any;
    use std::time::{Duration, Instant};

    use ep_core::bootstrap::LocalBootstrap;
    use ep_core::config::{GroupConfig, PlanConfig};
    use ep_core::engine::Plan;

    use super::*;

    fn last_error() -> String {
        // SAFETY: `ep_last_error` returns a string that lives until this thread fails again.
        unsafe { CStr::from_ptr(last_error::ep_last_error()) }.to_str().unwrap().to_string()
    }

    #[test]
    fn results_pass_and_errors_leave_their_sentence() {
        assert_eq!(guard("ep_x", || Ok(())), 0);
        assert_eq!(guard("ep_x", || Err(Error::invalid("rows is -1"))), 1);
        assert_eq!(last_error(), "ep_x: rows is -1");
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_text() {
        assert_eq!(guard("ep_x", || panic!("index {} is out", 7)), Status::Internal.code());
        assert!(last_error().ends_with("please report it: index 7 is out"), "{}", last_error());
        assert_eq!(guard("ep_x", || panic_any(7)), Status::Internal.code());
        assert!(last_error().ends_with("a panic without text"), "{}", last_error());
    }

    #[test]
    fn a_payload_that_panics_when_dropped_stays_inside() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        assert_eq!(guard("ep_x", || panic_any(Bomb)), Status::Internal.code());
    }

    #[test]
    fn a_panic_on_a_group_breaks_it_and_no_other() {
        let make = || {
            let bootstrap = LocalBootstrap::group(1).remove(0);
            let deadline = Instant::now() + Duration::from_secs(10);
            Group::create(&GroupConfig::default(), Box::new(bootstrap), deadline).unwrap()
        };
        let (group, other) = (make(), make());
        let status = guard("ep_x", || contain(&group, || panic!("index {} is out", 7)));
        assert_eq!(status, Status::Internal.code());
        let info = group.health(&mut [true]).expect("the group is broken");
        assert_eq!(info.status, Status::Internal);
        assert!(info.text.contains("index 7 is out"), "{}", info.text);
        let later = PlanConfig { topk: 1, num_experts: 1, ..PlanConfig::default() };
        // SAFETY: the plan has memory of its own.
        let plan = unsafe { Plan::create(&group, &later, None) }.unwrap();
        assert_eq!(plan.counts(None).unwrap_err().status, Status::Internal);
        // An error that is not a defect leaves the group alone.
        let status = guard("ep_x", || contain(&other, || Err::<(), _>(Error::invalid("rows is -1"))));
        assert_eq!(status, Status::InvalidArgument.code());
        assert_eq!(other.health(&mut [true]), None);
        group.close(Duration::from_secs(1)).unwrap();
        other.close(Duration::from_secs(1)).unwrap();
    }

    #[test]
    fn an_error_cannot_pass_for_success() {
        assert_eq!(guard("ep_x", || Err(Error::new(Status::Ok, "odd"))), Status::Internal.code());
    }
}
