//! `ep info`: version, backends, networks, processors, memory and settings.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ep_core::bootstrap::LocalBootstrap;
use ep_core::config::{GroupConfig, GroupInfo, MAX_LANES, MAX_RANKS, MAX_TOPK, MAX_WINDOWS};
use ep_core::engine::Group;
use serde_json::{Value, json};

use crate::output::say;

/// Environment variables that the library reads, and what they are without being set.
const SETTINGS: [(&str, &str); 4] = [
    ("EP_BOOTSTRAP_ADDR", "127.0.0.1, any port"),
    ("EP_CUDA_DEVICE", "0, or that of the thread's context"),
    ("EP_CUDA_MAX_SMS", "all of the device"),
    ("EP_CUDA_LEGACY_IPC", "0: only where the driver has nothing better"),
];

/// Processor features that the host backend has code for.
fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    for (name, present) in [
        ("avx", std::arch::is_x86_feature_detected!("avx")),
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("avx512", std::arch::is_x86_feature_detected!("avx512bw")),
    ] {
        if present {
            found.push(name);
        }
    }
    found
}

/// The value of the first line of a file of `/proc` that begins with `key`.
fn proc_value(path: &str, key: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// What a group of one rank says about this build.
fn probe() -> Result<GroupInfo> {
    let bootstrap = LocalBootstrap::group(1).pop().context("a group of one rank")?;
    let deadline = Instant::now() + Duration::from_secs(10);
    let group = Group::create(&GroupConfig::default(), Box::new(bootstrap), deadline)?;
    let info = group.info();
    group.close(Duration::from_secs(1))?;
    Ok(info)
}

fn facts() -> Result<Value> {
    let group = probe()?;
    let cuda = ep_cuda::device::survey();
    let fabric = ep_fabric::select::survey();
    let system = rustix::system::uname();
    let name = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let settings = SETTINGS.iter().chain(&ep_fabric::settings::SETTINGS).map(|(variable, default)| {
        let value = std::env::var(variable).ok();
        (variable.to_string(), json!({ "value": value, "default": default }))
    });
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "backends": {
            "host": { "available": true, "reason": group.backend_reason },
            "cuda": { "available": cuda.is_ok(), "reason": cuda.unwrap_or_else(|error| error.message) },
        },
        "transports": {
            "shm": { "available": true, "reason": "ranks of one machine, anonymous shared memory" },
            "fabric": match fabric {
                Ok((reason, nics)) => json!({ "available": true, "reason": reason, "nics": nics }),
                Err(error) => json!({ "available": false, "reason": error.message, "nics": [] }),
            },
        },
        "system": format!("{} {} {}", name(system.sysname()), name(system.release()), name(system.machine())),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "processor": proc_value("/proc/cpuinfo", "model name"),
        "features": features(),
        "memory": proc_value("/proc/meminfo", "MemTotal"),
        "page_bytes": rustix::param::page_size(),
        "defaults": {
            "lanes": group.num_lanes,
            "timeout_ms": group.timeout_ms,
            "max_local_experts": group.max_local_experts,
            "ring_bytes": group.ring_bytes,
        },
        "limits": { "ranks": MAX_RANKS, "lanes": MAX_LANES, "topk": MAX_TOPK, "windows": MAX_WINDOWS },
        "settings": serde_json::Map::from_iter(settings),
    }))
}

/// A value as a person reads it.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::from("unknown"),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

/// Runs the command.
///
/// # Errors
/// If not even a group of one rank can be made.
pub(crate) fn run(as_json: bool) -> Result<()> {
    let facts = facts()?;
    if as_json {
        say(facts.to_string())?;
        return Ok(());
    }
    say(format!("ep {}", plain(&facts["version"])))?;
    for kind in ["backends", "transports"] {
        say(format!("\n{kind}"))?;
        for (name, fact) in facts[kind].as_object().into_iter().flatten() {
            let mark = if fact["available"] == json!(true) { "yes" } else { "no" };
            say(format!("  {name:<18} {mark:<4} {}", plain(&fact["reason"])))?;
            for nic in fact["nics"].as_array().into_iter().flatten() {
                say(format!("  {:<23} NIC {}", "", plain(nic)))?;
            }
        }
    }
    say("\nmachine")?;
    for name in ["system", "processor", "cores", "features", "memory", "page_bytes"] {
        say(format!("  {name:<18} {}", plain(&facts[name])))?;
    }
    for kind in ["defaults", "limits"] {
        say(format!("\n{kind}"))?;
        for (name, value) in facts[kind].as_object().into_iter().flatten() {
            say(format!("  {name:<18} {}", plain(value)))?;
        }
    }
    say("\nsettings (environment)")?;
    for (name, fact) in facts["settings"].as_object().into_iter().flatten() {
        let value = match &fact["value"] {
            Value::Null => format!("not set: {}", plain(&fact["default"])),
            value => plain(value),
        };
        say(format!("  {name:<22} {value}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_name_the_version_the_backend_and_the_cores() -> Result<()> {
        let facts = facts()?;
        assert_eq!(facts["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(facts["backends"]["host"]["available"], json!(true));
        let fabric = &facts["transports"]["fabric"];
        assert_eq!(fabric["available"] == json!(true), !plain(&fabric["nics"]).is_empty(), "{fabric}");
        assert!(fabric["reason"].as_str().is_some_and(|reason| reason.contains("libfabric")), "{fabric}");
        assert!(facts["settings"]["EP_FABRIC_PROVIDER"].is_object());
        assert!(facts["cores"].as_u64().is_some_and(|cores| cores > 0));
        Ok(())
    }
}
