//! libfabric itself: found and opened at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};
use std::{env, fmt, fs};

use ep_core::{Error, Result, Status};

use super::{fi_fabric_attr, fi_info, fid_fabric, newer};

/// The variable with the path of the library to use.
pub(crate) const PATH_SETTING: &str = "EP_LIBFABRIC";

/// Where the installer of EFA puts it.
const EFA_PATHS: [&str; 2] = ["/opt/amazon/efa/lib/libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1"];
/// Its name since 2014, whatever the version.
const SONAME: &str = "libfabric.so.1";

type GetInfo = unsafe extern "C" fn(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const fi_info,
    info: *mut *mut fi_info,
) -> c_int;
type FreeInfo = unsafe extern "C" fn(info: *mut fi_info);
type DupInfo = unsafe extern "C" fn(info: *const fi_info) -> *mut fi_info;
type OpenFabric = unsafe extern "C" fn(
    attr: *mut fi_fabric_attr,
    fabric: *mut *mut fid_fabric,
    context: *mut c_void,
) -> c_int;
type Version = unsafe extern "C" fn() -> u32;
type StrError = unsafe extern "C" fn(errnum: c_int) -> *const c_char;

/// The functions that libfabric exports; all others are entries of tables.
pub(crate) struct Exports {
    pub(crate) getinfo: GetInfo,
    pub(crate) freeinfo: FreeInfo,
    pub(crate) dupinfo: DupInfo,
    pub(crate) fabric: OpenFabric,
    pub(crate) version: Version,
    pub(crate) strerror: StrError,
}

/// An open libfabric. It stays open for the life of the process: its providers have threads and exit handlers.
pub struct Library {
    pub(crate) exports: Exports,
    origin: String,
    version: u32,
}

impl Library {
    /// Opens libfabric, the first time; later calls repeat the answer.
    ///
    /// Where it is looked for, in this order: the path in `EP_LIBFABRIC` and nowhere else if it is set; the one
    /// that this process has loaded already, because two of them in a process hide the EFA devices from each
    /// other; that of the EFA installer; the loader's `libfabric.so.1`.
    ///
    /// # Errors
    /// [`Status::Unsupported`]: not found, not a libfabric, or older than 1.17.
    pub fn open() -> Result<Arc<Library>> {
        static OPENED: OnceLock<Result<Arc<Library>>> = OnceLock::new();
        OPENED.get_or_init(find).clone()
    }

    /// Major and minor version of the library.
    pub fn version(&self) -> (u32, u32) {
        (self.version >> 16, self.version & 0xffff)
    }

    /// The version as `FI_VERSION` makes it.
    pub(crate) fn raw_version(&self) -> u32 {
        self.version
    }

    /// The interface to ask this library for.
    pub(crate) fn interface(&self) -> u32 {
        self.version.min(newer::INTERFACE)
    }

    /// Where the library came from.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// libfabric's own words for an error number.
    pub(crate) fn text_of(&self, errno: u32) -> String {
        let errno = c_int::try_from(errno).unwrap_or(c_int::MAX);
        // SAFETY: answers every number with a static string, or null in a library that breaks its word.
        let text = unsafe { (self.exports.strerror)(errno) };
        if text.is_null() {
            return format!("error {errno}");
        }
        // SAFETY: not null, so a NUL-terminated string that stays.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Wraps functions, from a library or from a test.
    pub(crate) fn from_exports(exports: Exports, origin: String) -> Result<Library> {
        // SAFETY: takes nothing and needs no set-up.
        let version = unsafe { (exports.version)() };
        if version < newer::OLDEST {
            let (major, minor) = (version >> 16, version & 0xffff);
            return Err(Error::new(
                Status::Unsupported,
                format!("{origin} is libfabric {major}.{minor}, expected 1.17 or newer; install a newer one"),
            ));
        }
        Ok(Library { exports, origin, version })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.version();
        write!(f, "libfabric {major}.{minor} ({})", self.origin)
    }
}

fn find() -> Result<Arc<Library>> {
    if let Some(path) = env::var_os(PATH_SETTING).filter(|path| !path.is_empty()) {
        let path = path.to_string_lossy().into_owned();
        let handle = load(&path, libc::RTLD_NOW).map_err(|why| {
            unsupported(format!(
                "{PATH_SETTING}={path} cannot be opened ({why}); set it to a libfabric.so.1, or unset it"
            ))
        })?;
        return exports(handle, path);
    }
    // RTLD_NOLOAD answers only if somebody has loaded it.
    if let Ok(handle) = load(SONAME, libc::RTLD_NOW | libc::RTLD_NOLOAD) {
        return exports(handle, format!("{SONAME}, which the process had loaded"));
    }
    if let Some(path) = EFA_PATHS.into_iter().find(|path| fs::exists(path).unwrap_or(false)) {
        let handle = load(path, libc::RTLD_NOW).map_err(|why| {
            unsupported(format!("{path} cannot be opened ({why}); reinstall EFA, or set {PATH_SETTING}"))
        })?;
        return exports(handle, String::from(path));
    }
    let handle = load(SONAME, libc::RTLD_NOW).map_err(|why| {
        unsupported(format!(
            "there is no libfabric on this machine ({why}); install it, or set {PATH_SETTING} to its path"
        ))
    })?;
    exports(handle, String::from(SONAME))
}

fn unsupported(message: String) -> Error {
    Error::new(Status::Unsupported, message)
}

/// Loads a shared object, or says why not.
fn load(path: &str, flags: c_int) -> std::result::Result<*mut c_void, String> {
    let name = CString::new(path).map_err(|_| String::from("the path has a NUL byte"))?;
    // SAFETY: a NUL-terminated path. The initialisers that run are those of libfabric.
    let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: the text of the failure just seen on this thread, or null.
    let text = unsafe { libc::dlerror() };
    match text.is_null() {
        true => Err(String::from("not loaded")),
        // SAFETY: not null, so a NUL-terminated string that is copied before the next call.
        false => Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()),
    }
}

/// The functions of a loaded library, in the versions whose structs the bindings describe: newer libraries keep
/// them and convert.
fn exports(handle: *mut c_void, origin: String) -> Result<Arc<Library>> {
    let symbol = |name: &CStr, version: &CStr| {
        // SAFETY: the handle is open and the names are NUL-terminated.
        let address = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
        match address.is_null() {
            false => Ok(address),
            true => Err(unsupported(format!(
                "{origin} has no {}@{}: it is not libfabric, or older than 1.17; set {PATH_SETTING} to another",
                name.to_string_lossy(),
                version.to_string_lossy()
            ))),
        }
    };
    let (info, fabric, base) = (c"FABRIC_1.3", c"FABRIC_1.1", c"FABRIC_1.0");
    // SAFETY: each symbol, in this version, has the type of the field in every libfabric that has it.
    let exports = unsafe {
        Exports {
            getinfo: std::mem::transmute::<*mut c_void, GetInfo>(symbol(c"fi_getinfo", info)?),
            freeinfo: std::mem::transmute::<*mut c_void, FreeInfo>(symbol(c"fi_freeinfo", info)?),
            dupinfo: std::mem::transmute::<*mut c_void, DupInfo>(symbol(c"fi_dupinfo", info)?),
            fabric: std::mem::transmute::<*mut c_void, OpenFabric>(symbol(c"fi_fabric", fabric)?),
            version: std::mem::transmute::<*mut c_void, Version>(symbol(c"fi_version", base)?),
            strerror: std::mem::transmute::<*mut c_void, StrError>(symbol(c"fi_strerror", base)?),
        }
    };
    Library::from_exports(exports, origin).map(Arc::new)
}
