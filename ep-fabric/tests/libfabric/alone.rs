//! What one process sees by itself: libraries and providers that are not there, settings that do not fit.

use ep_core::Status;
use ep_fabric::transport::Transport;
use ep_fabric::{Library, Nic, Selection, Settings};

use crate::cell::{Cell, alone, cells, text_of};
use crate::ports;
use crate::rank::selection;

/// The process of a test here; started by [`crate::cell`] only.
pub(crate) fn scene(name: &str) {
    match name {
        "version" => println!("{}", Library::open().expect("opens")),
        "no_library" => no_library("/nonexistent"),
        "no_libfabric" => no_library("no fi_getinfo@FABRIC_1.3"),
        "no_provider" => no_provider(),
        "no_nic" => no_nic(),
        "too_deep" => too_deep(),
        "limits" => limits(),
        "ports" => ports::scene(),
        other => panic!("no scene {other}"),
    }
}

#[track_caller]
pub(crate) fn assert_runs(cell: &Cell, scene: &str, settings: &[(&str, &str)]) {
    let output = alone(cell, scene, settings);
    assert!(output.status.success(), "{cell:?} {scene}: {}\n{}", output.status, text_of(&output));
}

#[test]
fn a_machine_without_libfabric_is_told_so() {
    assert_runs(&Cell { library: String::from("/nonexistent"), provider: "" }, "no_library", &[]);
}

#[test]
fn a_library_that_is_another_one_is_told_so() {
    assert_runs(&Cell { library: String::from("libc.so.6"), provider: "" }, "no_libfabric", &[]);
}

fn no_library(part: &str) {
    let error = Library::open().expect_err("there is none");
    assert_eq!(error.status, Status::Unsupported);
    assert!(error.message.contains(part) && error.message.contains("EP_LIBFABRIC"), "{error}");
    assert_eq!(Library::open().unwrap_err(), error, "asked again");
}

#[test]
fn a_provider_that_is_not_there_is_named_with_those_that_are() {
    for cell in cells() {
        assert_runs(&Cell { provider: "efa", ..cell.clone() }, "no_provider", &[]);
        // libfabric's own filter leaves nothing that reaches another machine.
        assert_runs(&Cell { provider: "", ..cell }, "no_provider", &[("FI_PROVIDER", "sockets")]);
    }
}

fn no_provider() {
    let (library, settings) = (Library::open().expect("opens"), Settings::from_env().expect("the parent's"));
    let error = Selection::make(&library, &settings, false).err().expect("there is none");
    assert_eq!(error.status, Status::Unsupported);
    assert!(error.message.contains("there is: ") && error.message.contains("sockets"), "{error}");
}

#[test]
fn a_nic_that_is_not_there_is_named_with_those_that_are() {
    for cell in cells() {
        for nic in ["eth99", "192.0.2.77"] {
            assert_runs(&cell, "no_nic", &[("EP_FABRIC_NICS", nic)]);
        }
    }
}

fn no_nic() {
    let (library, settings) = (Library::open().expect("opens"), Settings::from_env().expect("the parent's"));
    let error = Selection::make(&library, &settings, false).err().expect("there is none");
    assert_eq!(error.status, Status::InvalidArgument);
    assert!(error.message.contains(&settings.nics[0]) && error.message.contains("it has "), "{error}");
}

#[test]
fn depths_that_the_nic_does_not_have_are_refused_with_numbers() {
    for cell in cells() {
        assert_runs(&cell, "too_deep", &[("EP_FABRIC_TX_DEPTH", "100000")]);
        assert_runs(&cell, "too_deep", &[("EP_FABRIC_TX_DEPTH", "64"), ("EP_FABRIC_CQ_DEPTH", "64")]);
    }
}

fn too_deep() {
    let (selection, settings) = selection();
    let error = Nic::open(&selection, 0, &settings).err().expect("does not fit");
    assert_eq!(error.status, Status::Capacity);
    let depth = settings.tx_depth.expect("set").to_string();
    assert!(error.message.contains(&depth) && error.message.contains("127.0.0.1"), "{error}");
    let error = Nic::open(&selection, 2, &settings).err().expect("there are two");
    assert_eq!(error.status, Status::OutOfRange);
}

#[test]
fn the_choice_and_the_limits_are_told() {
    for cell in cells() {
        assert_runs(&cell, "limits", &[("EP_FABRIC_TX_DEPTH", "128"), ("EP_FABRIC_CQ_DEPTH", "256")]);
    }
}

fn limits() {
    let (selection, settings) = selection();
    let asked = settings.provider.clone().expect("set");
    assert!(selection.reason().contains("asked for") && selection.reason().contains("EP_FABRIC_NICS"));
    assert_eq!(selection.kind(), asked);
    let nics = selection.nics();
    assert!(nics[0].contains("127.0.0.1") && nics[1].contains("127.0.0.2"), "{nics:?}");
    let nic = Nic::open(&selection, 1, &settings).expect("opens");
    let limits = nic.limits();
    assert_eq!((limits.tx_depth, limits.cq_depth), (128, 256));
    assert!(limits.max_write >= 1 << 30, "{limits:?}");
    let (major, minor) = selection.library().version();
    let version = format!("libfabric {major}.{minor}");
    assert!(limits.name.contains(&version) && limits.name.contains("127.0.0.2"), "{limits:?}");
}
