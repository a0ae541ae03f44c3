//! What `doctor` said: run as an operator runs it, beside a controller or without one, with the controller's settings.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::process::Command;

use serde_json::Value;

/// Somebody must do something.
pub(crate) const TO_DO: i32 = 3;

pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) items: Vec<Value>,
    /// All of its output.
    pub(crate) text: String,
}

/// `command` is the program with its settings.
pub(crate) async fn doctor(mut command: Command) -> Said {
    command.args(["doctor", "--standalone", "--json"]);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {text}"));
    Said { code: output.status.code().unwrap(), items: said["items"].as_array().unwrap().clone(), text }
}

impl Said {
    pub(crate) fn item(&self, name: &str) -> &Value {
        self.items.iter().find(|item| item["name"] == name).unwrap_or_else(|| panic!("there is no {name}: {:#?}", self.items))
    }

    pub(crate) fn state(&self, name: &str) -> &str {
        self.item(name)["state"].as_str().unwrap()
    }

    /// What must be done, by name.
    pub(crate) fn to_do(&self) -> Vec<&str> {
        self.items.iter().filter(|item| item["state"] == "todo").map(|item| item["name"].as_str().unwrap()).collect()
    }

    /// The item is to be done, and says both.
    pub(crate) fn assert_to_do(&self, name: &str, said: &str, way_out: &str) {
        let found = self.items.iter().filter(|item| item["name"] == name);
        let fits = |item: &&Value| {
            item["state"] == "todo"
                && item["said"].as_str().unwrap().contains(said)
                && item["to_do"].as_str().unwrap().contains(way_out)
        };
        assert!(found.clone().any(|item| fits(&item)), "{name} says {said:?} and {way_out:?}: {:#?}", self.items);
        assert_eq!(self.code, TO_DO);
    }
}
