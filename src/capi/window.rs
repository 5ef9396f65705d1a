//! Windows.

use std::ffi::c_void;
use std::sync::Arc;

use ep_core::engine::Window;
use ep_core::{Error, Status};

use super::copy_out::ValueOut;
use super::group::{SharedGroup, pin_group};
use super::guard::{contain, guard};
use super::handle::{InUse, Kind, Object, Table};
use super::types::{EpGroup, EpStatus, EpWindow};

static WINDOWS: Table<WindowObject> = Table::new();

/// What an `ep_window_t` names.
struct WindowObject {
    window: Window,
    group: Arc<SharedGroup>,
}

impl Object for WindowObject {
    type Opaque = EpWindow;
    const KIND: Kind = Kind::Window;
}

/// `ep_window_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_window_allocate(
    group: *mut EpGroup,
    bytes: usize,
    window_out: *mut *mut EpWindow,
) -> EpStatus {
    guard("ep_window_allocate", || {
        let group = Arc::clone(&pin_group(group)?.shared);
        // SAFETY: by the header, the address of a pointer.
        let window_out = unsafe { ValueOut::new(window_out, "window_out") }?;
        let window = contain(&group.group, || Window::allocate(&group.group, bytes))?;
        window_out.write(WINDOWS.insert(WindowObject { window, group })?);
        Ok(())
    })
}

/// `ep_window_register`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_window_register(
    group: *mut EpGroup,
    data: *mut c_void,
    bytes: usize,
    window_out: *mut *mut EpWindow,
) -> EpStatus {
    guard("ep_window_register", || {
        let group = pin_group(group)?;
        // SAFETY: by the header, the address of a pointer.
        let _window_out = unsafe { ValueOut::new(window_out, "window_out") }?;
        if data.is_null() && bytes != 0 {
            return Err(Error::invalid(format!("data is NULL, expected the address of {bytes} bytes")));
        }
        let backend = if group.shared.group.is_on_device() { "CUDA" } else { "host" };
        Err(Error::new(
            Status::Unsupported,
            format!(
                "the {backend} backend's peers can map only memory that the library allocated; use \
                 ep_window_allocate, and place the rows in what ep_window_data returns"
            ),
        ))
    })
}

/// `ep_window_data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_window_data(
    window: *mut EpWindow,
    data_out: *mut *mut c_void,
    bytes_out: *mut usize,
) -> EpStatus {
    guard("ep_window_data", || {
        let window = WINDOWS.pin(window, "window")?;
        window.group.check_alive("window")?;
        // SAFETY: by the header, the address of a pointer.
        let data_out = unsafe { ValueOut::new(data_out, "data_out") }?;
        // SAFETY: by the header, the address of a size.
        let bytes_out = unsafe { ValueOut::new(bytes_out, "bytes_out") }?;
        data_out.write(window.window.data().cast());
        bytes_out.write(window.window.bytes());
        Ok(())
    })
}

/// `ep_window_release`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ep_window_release(window: *mut EpWindow) -> EpStatus {
    guard("ep_window_release", || {
        if !window.is_null() {
            drop(WINDOWS.retire(window, "window", InUse::Refused)?);
        }
        Ok(())
    })
}
