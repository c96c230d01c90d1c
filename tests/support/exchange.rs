//! Reads recorded exchanges (`fixtures/`): lines of the request behind `> `, lines of the answer's head behind `< `,
//! and the answer's body after an empty line.

#[derive(Debug)]
#[allow(dead_code, reason = "each test binary reads what it needs")]
pub struct Exchange {
    pub method: String,
    pub path: String,
    /// The body of the request; empty without one.
    pub request: String,
    pub status: u16,
    /// The answer's headers as they were sent, without those of the connection.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

#[allow(dead_code, reason = "each test binary reads what it needs")]
impl Exchange {
    pub fn parse(text: &str) -> Self {
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("> "));
        let mut first = lines.next().expect("a record starts with its request").split(' ');
        let method = first.next().unwrap_or_default().to_owned();
        let path = first.next().unwrap_or_default().to_owned();
        let lines = text.lines().filter_map(|line| line.strip_prefix('>')).map(str::trim_start);
        let request = lines.skip_while(|line| !line.is_empty()).collect();
        let mut head = text.lines().filter_map(|line| line.strip_prefix("< "));
        let status = head.next().expect("a record holds the answer's status");
        let status = status.trim_start_matches("HTTP/1.1 ").split(' ').next().unwrap_or_default();
        let headers = head
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .filter(|(name, _)| {
                !matches!(name.as_str(), "connection" | "keep-alive" | "transfer-encoding" | "content-length")
            })
            .collect();
        let answer = text.find("\n< ").expect("a record holds an answer");
        let body = text[answer..].split_once("\n\n").map_or("", |(_, body)| body);
        let status = status.parse().expect("a status is a number");
        Self { method, path, request, status, headers, body: body.to_owned() }
    }

    /// A header of the answer, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// Every file of a folder of fixtures whose name ends so, in order.
#[allow(dead_code, reason = "each test binary reads what it needs")]
pub fn files(folder: &str, ending: &str) -> Vec<(String, String)> {
    // The crate that reads it stands at the root or below it.
    let mut places = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|place| place.join("fixtures"));
    let root = places.find(|place| place.is_dir()).expect("the fixtures are there").join(folder);
    let entries = std::fs::read_dir(root).expect("the folder of fixtures is there");
    let mut found: Vec<_> = entries
        .map(|entry| entry.expect("a folder can be read").path())
        .filter(|path| path.to_string_lossy().ends_with(ending))
        .map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (name, std::fs::read_to_string(&path).expect("a fixture can be read"))
        })
        .collect();
    found.sort();
    found
}
