// From Go by SQL: an INSERT beside your own rows. Accepted when your transaction commits.
// `go get github.com/lib/pq`, then SHARDLINE_DATABASE_URL=... go run docs/examples/plain_sql.go
package main

import (
	"database/sql"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/lib/pq"
)

const insert = `INSERT INTO jobs (model, prompt, params)
VALUES ('clerk', 'sort: 31, 4, 15 =', '{"temperature": 0}') RETURNING id`

const ended = `SELECT jobs.state, coalesce(results.text, '')
FROM jobs LEFT JOIN results ON results.job_id = jobs.id
WHERE jobs.id = $1 AND jobs.finished_at IS NOT NULL`

func main() {
	url := os.Getenv("SHARDLINE_DATABASE_URL")
	database, err := sql.Open("postgres", url)
	check(err)
	defer database.Close()
	listener := pq.NewListener(url, time.Second, time.Minute, nil)
	defer listener.Close()
	check(listener.Listen("shardline_done"))

	transaction, err := database.Begin()
	check(err)
	var id, state, answer string
	check(transaction.QueryRow(insert).Scan(&id))
	check(transaction.Commit())
	for err = sql.ErrNoRows; err == sql.ErrNoRows; {
		// NOTIFY says that some job has ended. The row says which, also if a NOTIFY was missed.
		select {
		case <-listener.Notify:
		case <-time.After(time.Second):
		}
		err = database.QueryRow(ended, id).Scan(&state, &answer)
	}
	check(err)
	fmt.Println(id, state, answer)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
