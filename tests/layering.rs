//! Dependencies point down only: `ep` over `ep-fabric` and `ep-cuda` over `ep-core`, and nothing under
//! the command.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Which members of the workspace each one may depend on, whether to build, to run or to test.
const ALLOWED: [(&str, &[&str]); 6] = [
    ("ep-core", &[]),
    ("ep-fabric", &["ep-core"]),
    ("ep-cuda", &["ep-core"]),
    ("ep", &["ep-core", "ep-fabric", "ep-cuda"]),
    ("ep-peer", &["ep-core"]),
    ("ep-cli", &["ep-core", "ep-fabric", "ep-cuda", "ep", "ep-peer"]),
];

/// The dependencies among the members of a workspace, from the output of `cargo metadata --no-deps`.
fn member_dependencies(metadata: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let text = |value: &Value| value.as_str().expect("a name is a string").to_string();
    let packages = metadata["packages"].as_array().expect("metadata lists packages");
    let members: BTreeSet<String> = packages.iter().map(|package| text(&package["name"])).collect();
    let below = |package: &Value| {
        let dependencies = package["dependencies"].as_array().expect("a package lists dependencies");
        dependencies.iter().map(|d| text(&d["name"])).filter(|name| members.contains(name)).collect()
    };
    packages.iter().map(|package| (text(&package["name"]), below(package))).collect()
}

/// One sentence for every dependency that is not allowed.
fn violations(dependencies: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut found = Vec::new();
    for (name, below) in dependencies {
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| known == name) else {
            found.push(format!("{name} has no place in the layers: add it to tests/layering.rs"));
            continue;
        };
        for other in below.iter().filter(|other| !allowed.contains(&other.as_str())) {
            found.push(format!("{name} depends on {other}, and may depend on {allowed:?} only"));
        }
    }
    found
}

#[test]
fn dependencies_point_down() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version=1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata = serde_json::from_slice(&output.stdout).expect("metadata is JSON");
    let dependencies = member_dependencies(&metadata);
    assert!(dependencies["ep"].contains("ep-core"), "reads the dependencies: {dependencies:?}");
    assert_eq!(violations(&dependencies), Vec::<String>::new());
}

#[test]
fn a_dependency_that_points_up_or_sideways_is_found() {
    let package = |name: &str, below: &[&str]| {
        let dependencies: Vec<Value> = below.iter().map(|name| serde_json::json!({ "name": name })).collect();
        serde_json::json!({ "name": name, "dependencies": dependencies })
    };
    let metadata = serde_json::json!({ "packages": [
        package("ep-core", &["libc", "ep"]),
        package("ep-fabric", &["ep-core", "ep-cuda"]),
        package("ep-cuda", &["ep-core"]),
        package("ep", &["ep-core", "ep-cli"]),
        package("ep-cli", &["ep", "ep-core"]),
        package("stray", &[]),
    ] });
    let found = violations(&member_dependencies(&metadata));
    let heads: Vec<&str> = found.iter().map(|line| line.split(',').next().unwrap_or(line)).collect();
    assert_eq!(
        heads,
        [
            "ep depends on ep-cli",
            "ep-core depends on ep",
            "ep-fabric depends on ep-cuda",
            "stray has no place in the layers: add it to tests/layering.rs",
        ]
    );
}
